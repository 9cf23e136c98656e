"""What the prepare.py programs share. Nothing else needs it: a dataset that is made is read by data/tokenfiles.py.

    script.py            their command lines
    writer.py            tokens into train.bin or shards, val.bin and meta.pkl
    journal.py lock.py   so that an interruption loses nothing and two preparations do not meet
    tinyshakespeare.py   the text of shakespeare_char and shakespeare
    textfiles.py         text: files of your own
    stream.py resume.py  openwebtext and fineweb_edu: streamed, in several processes, going on after an interruption
"""
