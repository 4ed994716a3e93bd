package admin

var Changes = changes
