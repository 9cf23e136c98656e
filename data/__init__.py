"""The data room: token files on disk, the datasets that fill them, tokenizers, and one synthetic task.

    tokenfiles.py        read and write nanoGPT's train.bin, val.bin and meta.pkl
    datasets.py          find a dataset folder by name, preparing it if need be
    tokenizer.py         text <-> token ids: the characters of meta.pkl, or GPT-2 BPE
    <dataset>/prepare.py makes one dataset; run it by hand, or let ensure_dataset() run it
    recall/              a synthetic associative recall task with controlled distances (made in memory, no files)

Nothing here imports torch.
"""
