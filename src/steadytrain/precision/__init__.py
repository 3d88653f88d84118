"""Number formats of training, and the average of the weights.

policy = precision.policy(recipe.precision, device)
average = precision.ema(module, 0.999)
"""

from steadytrain.precision.average import Ema as Ema
from steadytrain.precision.average import ema as ema
from steadytrain.precision.blocked import use_blocks as use_blocks
from steadytrain.precision.policy import DTYPES as DTYPES
from steadytrain.precision.policy import Policy as Policy
from steadytrain.precision.policy import policy as policy
from steadytrain.precision.policy import set_products as set_products
