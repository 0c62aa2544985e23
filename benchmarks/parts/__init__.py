"""What the programs beside this folder are made of: a folder per subject."""
