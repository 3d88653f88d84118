"""Number formats of training, and the average of the weights.

policy = precision.policy(recipe.precision, device)
average = precision.ema(module, 0.999)
"""

from steadytrain.training.ema import Ema as Ema
from steadytrain.training.ema import ema as ema
from steadytrain.training.precision.policy import DTYPES as DTYPES
from steadytrain.training.precision.policy import Policy as Policy
from steadytrain.training.precision.policy import policy as policy
from steadytrain.training.precision.policy import set_products as set_products
