"""Every private API of torch that swift-agent uses, one small function each, one module per part of torch."""
