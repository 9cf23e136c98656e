"""Free memory of the machine."""
from config.sizes import available_memory, physical_memory


def test_some_memory_is_available_or_all_where_the_system_does_not_say(monkeypatch):
    assert 0 < available_memory() <= physical_memory()
    monkeypatch.setattr('config.sizes.Path.read_text', lambda path: 'MemTotal: 9 kB')
    assert available_memory() == physical_memory()
    monkeypatch.setattr('config.sizes.physical_memory', lambda: 0)
    assert available_memory() == 0
