"""Models by name, their weights, and what of them is trained.

built = models.build(recipe.Model("timm/resnet50", pretrained=True), num_classes=10, channels=3, size=None)
groups = models.parameter_groups(built, train="full", decay=0.75, weight_decay=1e-4)
"""

from steadytrain.models.build import Built as Built
from steadytrain.models.build import build as build
from steadytrain.models.build import fetch_weights as fetch_weights
from steadytrain.models.build import inspect_checkpoint as inspect_checkpoint
from steadytrain.models.build import num_outputs as num_outputs
from steadytrain.models.build import require_size as require_size
from steadytrain.models.build import require_weights as require_weights
from steadytrain.models.build import try_forward as try_forward
from steadytrain.models.build import usual_size as usual_size
from steadytrain.models.fitting import find_model as find_model
from steadytrain.models.fitting import require_fit as require_fit
from steadytrain.models.groups import first_epochs as first_epochs
from steadytrain.models.groups import lacks_statistics as lacks_statistics
from steadytrain.models.groups import parameter_groups as parameter_groups
from steadytrain.models.groups import set_train_mode as set_train_mode
from steadytrain.models.objects import Given as Given
from steadytrain.models.objects import name_model as name_model
from steadytrain.models.registry import BUILT_IN as BUILT_IN
from steadytrain.models.registry import find as find
from steadytrain.models.registry import has_local_weights as has_local_weights
from steadytrain.models.weights import Input as Input
from steadytrain.models.weights import read_weights as read_weights
