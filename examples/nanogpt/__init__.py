"""A GPT-2 trainer: `python -m examples.nanogpt.train`.

data.py         corpora and batches
model.py        the network and its loss
optimizers.py   optimizers and schedules by name
train.py        the command line and the loop
sharding.py     the mesh and what lies where
checkpoint.py   saving and resuming
sample.py       text from a model
plot.py         the loss curve
"""
