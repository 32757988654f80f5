"""ArviZ: how arrays of draws become its DataTree, for samplers of one's own."""

from ppleffects.inference.datatree import site_dims as site_dims
from ppleffects.inference.datatree import to_datatree as to_datatree
