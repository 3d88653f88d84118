"""From a recipe to trained weights: state, step, loop, evaluation, and the weights in use."""

from steadytrain.distributed.process_group import Group as Group
from steadytrain.distributed.process_group import init_group as init_group
from steadytrain.training.calibration import calibrate as calibrate
from steadytrain.training.defaults import default_recipe as default_recipe
from steadytrain.training.defaults import finetune as finetune
from steadytrain.training.evaluation import Evaluation as Evaluation
from steadytrain.training.feature_vectors import features as features
from steadytrain.training.inference import Prediction as Prediction
from steadytrain.training.inference import evaluate as evaluate
from steadytrain.training.inference import predict as predict
from steadytrain.training.loop import Outcome as Outcome
from steadytrain.training.loop import repeat as repeat
from steadytrain.training.loop import steps as steps
from steadytrain.training.loop import train as train
from steadytrain.training.trained import Trained as Trained
from steadytrain.training.trained import restore as restore
