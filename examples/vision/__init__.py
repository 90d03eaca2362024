"""Image classifiers: `python -m examples.vision.train`.

train.py   the command line, the optimizers and the training loop
model.py   a small convolutional network, ResNet-18, their loss and their dimension numbers
data.py    scikit-learn's digits, and CIFAR-10 and CIFAR-100 from their binary files
"""
