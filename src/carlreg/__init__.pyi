"""The public names and their modules, for type checkers and for `__init__.py`."""

from carlreg.cohort.api import register_many as register_many
from carlreg.fast.precision import mixed_precision as mixed_precision
from carlreg.geometry.fitting import invert as invert
from carlreg.geometry.transforms import Affine as Affine
from carlreg.geometry.transforms import Composition as Composition
from carlreg.geometry.transforms import DisplacementField as DisplacementField
from carlreg.geometry.transforms import Identity as Identity
from carlreg.geometry.transforms import Transform as Transform
from carlreg.geometry.transforms import compose as compose
from carlreg.geometry.transforms import warp as warp
from carlreg.model.algorithms import Augmented as Augmented
from carlreg.model.algorithms import ClosedFormXi as ClosedFormXi
from carlreg.model.algorithms import CoordinateAttention as CoordinateAttention
from carlreg.model.algorithms import Downsample as Downsample
from carlreg.model.algorithms import PredictDisplacement as PredictDisplacement
from carlreg.model.algorithms import RegistrationAlgorithm as RegistrationAlgorithm
from carlreg.model.algorithms import TwoStep as TwoStep
from carlreg.model.attention import attention_moments as attention_moments
from carlreg.model.attention import coordinate_attention as coordinate_attention
from carlreg.model.files import load as load
from carlreg.model.files import save as save
from carlreg.model.shipped import pretrained as pretrained
from carlreg.model.zoo import add_refinement as add_refinement
from carlreg.model.zoo import carl as carl
from carlreg.model.zoo import carl_rot as carl_rot
from carlreg.model.zoo import gradicon as gradicon
from carlreg.model.zoo import xi as xi
from carlreg.objective.fields import Optimized as Optimized
from carlreg.objective.fields import optimize_fields as optimize_fields
from carlreg.objective.instance import instance_optimize as instance_optimize
from carlreg.objective.losses import Loss as Loss
from carlreg.objective.losses import diffusion as diffusion
from carlreg.objective.losses import lncc as lncc
from carlreg.objective.losses import lncc2 as lncc2
from carlreg.objective.losses import mind as mind
from carlreg.objective.losses import registration_loss as registration_loss
from carlreg.objective.losses import ssd as ssd
from carlreg.registration.api import register as register
from carlreg.registration.result import Registration as Registration
from carlreg.training.loop import train as train
from carlreg.training.stages import Stage as Stage

__version__: str
