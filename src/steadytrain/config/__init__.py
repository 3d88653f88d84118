"""The recipe of a run, as frozen data.

A :class:`Recipe` is validated where it is made: an invalid one cannot exist. It goes to JSON and
back without loss, its ``digest`` names it, and it changes only by :meth:`Recipe.with_`.

>>> recipe = Recipe(data=Data(train="train.rec"), model=Model("resnet20"), optim=Optim("sgd", lr=0.1),
...                 budget=Budget(epochs=6))
>>> recipe.with_({"optim.lr": 0.2}).optim.lr
0.2
>>> Recipe.from_json(recipe.to_json()) == recipe
True
"""

from __future__ import annotations

from steadytrain.config.parts import Budget as Budget
from steadytrain.config.parts import CompileMode as CompileMode
from steadytrain.config.parts import Data as Data
from steadytrain.config.parts import Every as Every
from steadytrain.config.parts import Layout as Layout
from steadytrain.config.parts import Model as Model
from steadytrain.config.parts import Numbers as Numbers
from steadytrain.config.parts import Optim as Optim
from steadytrain.config.parts import Parallel as Parallel
from steadytrain.config.parts import Precision as Precision
from steadytrain.config.parts import Scalar as Scalar
from steadytrain.config.recipe import Recipe as Recipe
