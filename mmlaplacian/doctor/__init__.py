"""``python -m mmlaplacian.doctor``: what is installed, what each op will run, and what to mend."""
