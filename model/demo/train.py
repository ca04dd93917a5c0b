"""Where `train` was: it says where it is."""

raise ImportError("millrace.model.demo.train has moved: run millrace.model.demo.making.train", name=__name__)
