"""What methods share: a floor of single files, and rooms with one idea each that are entered by their doors."""
