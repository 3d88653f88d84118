"""What to train, as frozen data.

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

from steadytrain.recipe.parts import MOST_EPOCHS as MOST_EPOCHS
from steadytrain.recipe.parts import MOST_STEPS as MOST_STEPS
from steadytrain.recipe.parts import Budget as Budget
from steadytrain.recipe.parts import CompileMode as CompileMode
from steadytrain.recipe.parts import Data as Data
from steadytrain.recipe.parts import Every as Every
from steadytrain.recipe.parts import Layout as Layout
from steadytrain.recipe.parts import Model as Model
from steadytrain.recipe.parts import Numbers as Numbers
from steadytrain.recipe.parts import Optim as Optim
from steadytrain.recipe.parts import Parallel as Parallel
from steadytrain.recipe.parts import Precision as Precision
from steadytrain.recipe.parts import Scalar as Scalar
from steadytrain.recipe.recipe import Recipe as Recipe
