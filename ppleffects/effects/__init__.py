"""Effects for JAX: primitives that mean what an interpretation says, carried through every control flow.

This package knows JAX and knows no probability; any effect can be built on it.
"""

from ppleffects.effects._jax import shard_map_p as shard_map_p
from ppleffects.effects._jax import varying as varying
from ppleffects.effects.activity import activated as activated
from ppleffects.effects.cast import run_varying as run_varying
from ppleffects.effects.context import Crossing as Crossing
from ppleffects.effects.context import Frame as Frame
from ppleffects.effects.context import Part as Part
from ppleffects.effects.context import Shared as Shared
from ppleffects.effects.context import State as State
from ppleffects.effects.handlers import default_checkpoint_handler as default_checkpoint_handler
from ppleffects.effects.handlers import default_cond_handler as default_cond_handler
from ppleffects.effects.handlers import default_custom_jvp_handler as default_custom_jvp_handler
from ppleffects.effects.handlers import default_custom_vjp_handler as default_custom_vjp_handler
from ppleffects.effects.handlers import default_dispatcher as default_dispatcher
from ppleffects.effects.handlers import default_handlers as default_handlers
from ppleffects.effects.handlers import default_jit_handler as default_jit_handler
from ppleffects.effects.handlers import default_scan_handler as default_scan_handler
from ppleffects.effects.handlers import default_while_handler as default_while_handler
from ppleffects.effects.handlers import rebind_lane_cond as rebind_lane_cond
from ppleffects.effects.interpreter import Dispatcher as Dispatcher
from ppleffects.effects.interpreter import Handler as Handler
from ppleffects.effects.interpreter import HandlerResult as HandlerResult
from ppleffects.effects.interpreter import Interpreter as Interpreter
from ppleffects.effects.interpreter import Uninitialized as Uninitialized
from ppleffects.effects.interpreter import reinterpret as reinterpret
from ppleffects.effects.lift import lift_constants as lift_constants
from ppleffects.effects.primitive import Lane as Lane
from ppleffects.effects.primitive import effect_primitive as effect_primitive
from ppleffects.effects.shard_map import default_shard_map_handler as default_shard_map_handler
from ppleffects.effects.structure import structure_of as structure_of
