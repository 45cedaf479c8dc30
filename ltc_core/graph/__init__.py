"""The graph that one cut of the recorded program is: nodes, values, views, collectives, and passes over it."""
