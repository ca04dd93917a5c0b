"""Where `evaluate` was: it says where it is."""

raise ImportError("millrace.model.demo.evaluate has moved: run millrace.model.demo.making.evaluate", name=__name__)
