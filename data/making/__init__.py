"""What the prepare.py programs share; data/tokenfiles.py reads the results.

    script.py            their command lines
    writer.py lock.py    write a dataset safely, one process at a time
    tinyshakespeare.py   the text of shakespeare_char and shakespeare
    textfiles.py         text: files of your own
    stream.py            openwebtext and fineweb_edu: streamed, encoded in threads, resumable
"""
