"""nextstate: serve a language model, read what happens next after every answer, and train on it while it serves."""

import os

# On a small busy CPU, torch's OpenMP threads spin while they wait for one another and starve the cores they wait
# for; waiting passively was 5.7 times faster. libgomp reads both variables once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

__version__ = "0.1.0"
