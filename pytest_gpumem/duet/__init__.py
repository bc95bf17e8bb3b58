"""The duet: base against head in alternating fresh processes on one GPU, until the difference is decided."""
