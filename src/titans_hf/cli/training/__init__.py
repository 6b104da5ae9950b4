"""The parts of train.py: tokenizer, documents, blocks, model, checkpoints, and the files that a run leaves."""
