"""The search for the hardware, the layout and the policy that serve a workload within a service level."""
