"""The world of the bundled model: scenes of simple shapes, captions for them, and a judge of what a picture shows.

All of it is drawn and judged by arithmetic, so that the right answer is known without a learned model.
"""
