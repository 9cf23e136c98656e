"""Data sets of arrays."""
from data.making.writer import TokenWriter


def write_dataset(folder, splits, meta) -> None:
    """Write the splits, {'train': 1-D array of token ids, ...}, and meta.pkl if there is `meta`."""
    with TokenWriter(folder, meta) as out:
        for name, ids in splits.items():
            out.add(name, ids)
