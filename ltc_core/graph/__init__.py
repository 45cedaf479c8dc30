"""The graph made by one cut of the recorded program: nodes, values, views, collectives, and passes over the graph."""
