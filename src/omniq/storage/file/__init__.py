"""A queue in a folder. `driver` is the storage, `folder` commits, `lines` and `journal` are the format."""

from omniq.storage.file.driver import FileStorage as FileStorage
