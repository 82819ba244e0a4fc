//! Clusters: devices, links and measured efficiency.
