"""The command `forq train-medusa`: the decoding library's own, which takes a model by its alias here."""

from apar.training.medusa_cli import train_medusa
from worker.train_cli import with_aliases

train_medusa = with_aliases(train_medusa, "Alias, or folder in the Hugging Face layout, of the model to draft for.")
