package admin

// Changes are all calls that change something.
var Changes = changes

// Write answers with JSON.
var Write = write
