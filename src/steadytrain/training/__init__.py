"""Training from a recipe to trained weights: state, step, loop, evaluation, and the weights in use."""

from steadytrain.distributed.process_group import Group as Group
from steadytrain.distributed.process_group import init_group as init_group
from steadytrain.training.evaluation import Evaluation as Evaluation
from steadytrain.training.features.held_out import calibrate as calibrate
from steadytrain.training.inference.inference import evaluate as evaluate
from steadytrain.training.inference.inference import predict as predict
from steadytrain.training.inference.trained import Trained as Trained
from steadytrain.training.inference.trained import restore as restore
from steadytrain.training.loop.defaults import default_recipe as default_recipe
from steadytrain.training.loop.defaults import finetune as finetune
from steadytrain.training.loop.defaults import steps as steps
from steadytrain.training.loop.defaults import train as train
from steadytrain.training.loop.steps import repeat as repeat
