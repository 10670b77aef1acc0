"""The parts of the built-in stories: the world and its words, the beats every plot uses, and the plots."""
