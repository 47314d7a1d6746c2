"""Tables, plots and the HTML report of a run. Does not import torch."""
