"""A GPT-2 trainer: `python -m examples.nanogpt.train`.

config.py       the command line
train.py        the run and its loop
step.py         one training step
model.py        the network and its loss
optimizers.py   optimizers, schedules and the papers' settings by name
data.py         corpora and batches
prepare.py      text to train.bin and val.bin
tokenizer.py    text to tokens and back
sharding.py     processes, the mesh, and what lies where
checkpoint.py   saving and resuming
metrics.py      metrics.jsonl and TensorBoard
plot.py         figures
compare.py      --compare: several optimizers in one figure and table
sample.py       text from a model
huggingface.py  models to and from Hugging Face's format
hardware.py     what is known of accelerators
compile.py      a step compiled for TPUs that are not there
tpu.py          the environment that this needs
"""
