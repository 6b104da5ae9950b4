"""Commands for training and using models. A file of this folder is a command; shared code lies in the subfolders."""
