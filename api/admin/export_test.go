package admin

// Changes are all calls that change something.
var Changes = changes
