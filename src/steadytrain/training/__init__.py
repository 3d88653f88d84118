"""From a recipe to trained weights: state, step, loop, evaluation, and the weights in use."""

from steadytrain.engines import Group as Group
from steadytrain.engines import joined as joined
from steadytrain.training.evaluation import Evaluation as Evaluation
from steadytrain.training.loop import Outcome as Outcome
from steadytrain.training.loop import steps as steps
from steadytrain.training.loop import train as train
from steadytrain.training.prediction import Prediction as Prediction
from steadytrain.training.prediction import predict as predict
from steadytrain.training.trained import Trained as Trained
from steadytrain.training.trained import evaluate as evaluate
from steadytrain.training.trained import restore as restore
