"""The placement of a flow, the plan of its tasks and channels, and the settings of a job."""
