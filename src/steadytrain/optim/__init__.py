"""Optimizers by name, on the fused kernels where torch has them; losses by name.

optimizer = optim.build(recipe.optim, groups, lr=0.1, device=device)
optim.set_lr(optimizer, 0.05)
"""

from steadytrain.optim.losses import Loss as Loss
from steadytrain.optim.losses import balanced_weights as balanced_weights
from steadytrain.optim.losses import make_loss as make_loss
from steadytrain.optim.optimizers import OPTIMIZERS as OPTIMIZERS
from steadytrain.optim.optimizers import build as build
from steadytrain.optim.optimizers import check_name as check_name
from steadytrain.optim.optimizers import find_kind as find_kind
from steadytrain.optim.optimizers import kinds as kinds
from steadytrain.optim.optimizers import set_lr as set_lr
from steadytrain.optim.optimizers import set_momentum as set_momentum
