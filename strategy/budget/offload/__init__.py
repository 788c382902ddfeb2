"""The terms on which plans may copy values to the host: settings and rates in, what the planner takes out."""
