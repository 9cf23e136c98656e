"""Free memory: the machine's, limited by control groups."""
import pytest

from config.sizes import available_memory, physical_memory

MB = 2 ** 20
UNLIMITED = 2 ** 63 - 4096  # version 1's value for it


def written(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'{text}\n')
    return root


def group(folder, limit, used, cache=0, version=2):
    names = ('memory.max', 'memory.current', 'inactive_file') if version == 2 else \
            ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file')
    return {f'{folder}/{names[0]}': limit, f'{folder}/{names[1]}': used,
            f'{folder}/memory.stat': f'anon {used - cache}\n{names[2]} {cache}'}


V2, V1 = 'sys/fs/cgroup', 'sys/fs/cgroup/memory'
FREE = {'proc/meminfo': 'MemTotal: 9999999 kB\nMemAvailable:   1024000 kB'}


@pytest.mark.parametrize('files, free', [
    ({}, 1000),
    (group(V2, 600 * MB, 100 * MB), 500),
    (group(V2, 600 * MB, 100 * MB, cache=40 * MB), 540),      # the page cache can be freed
    (group(V2, 'max', 100 * MB), 1000),
    (group(V1, 600 * MB, 100 * MB, version=1), 500),
    (group(V1, 600 * MB, 100 * MB, cache=40 * MB, version=1), 540),
    (group(V1, UNLIMITED, 100 * MB, version=1), 1000),
    # the limit was lowered: 1 byte, because 0 means unknown
    (group(V2, 600 * MB, 700 * MB), 0),
    ({f'{V2}/memory.max': 600 * MB, f'{V2}/memory.current': 100 * MB}, 500),
    # the path is the host's: what is mounted here counts
    (group(V2, 600 * MB, 100 * MB) | {'proc/self/cgroup': '0::/docker/1234'}, 500)])
def test_a_limit_of_the_control_group_is_respected(tmp_path, files, free):
    assert available_memory(written(tmp_path, FREE | files)) == max(1, free * MB)


@pytest.mark.parametrize('folder, version, entries', [
    (V2, 2, '0::/job/step'), (V1, 1, '5:cpu:/other\n4:freezer,memory:/job/step\n0::/'),
    (V1, 1, '0::/elsewhere\n4:memory:/job/step')])
def test_groups_around_the_process_count_too(tmp_path, folder, version, entries):
    step = group(f'{folder}/job/step', 800 * MB, 100 * MB, version=version)
    written(tmp_path, FREE | {'proc/self/cgroup': entries} | step)
    assert available_memory(tmp_path) == 700 * MB
    written(tmp_path, group(f'{folder}/job', 650 * MB, 250 * MB, version=version))
    written(tmp_path, group(f'{folder}/other', 1 * MB, 0, version=version))  # another group
    assert available_memory(tmp_path) == 400 * MB


def test_without_meminfo_it_is_what_the_machine_has(tmp_path, monkeypatch):
    assert available_memory(tmp_path) == physical_memory() > 600 * MB
    written(tmp_path, group(V2, 600 * MB, 100 * MB))
    assert available_memory(tmp_path) == 500 * MB
    monkeypatch.setattr('config.sizes.physical_memory', lambda: 0)
    assert available_memory(tmp_path) == 500 * MB
    assert available_memory(tmp_path / 'nothing') == 0
