"""Other libraries: what comes from them and what goes to them."""

from ppleffects.interop.arviz import to_datatree as to_datatree
