"""From a recipe to trained weights: state, step, loop, evaluation, and the weights in use."""

from steadytrain.train.evaluate import Evaluation as Evaluation
from steadytrain.train.loop import Outcome as Outcome
from steadytrain.train.loop import steps as steps
from steadytrain.train.loop import train as train
from steadytrain.train.predict import Prediction as Prediction
from steadytrain.train.predict import predict as predict
from steadytrain.train.restore import Trained as Trained
from steadytrain.train.restore import evaluate as evaluate
from steadytrain.train.restore import restore as restore
