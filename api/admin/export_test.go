package admin

var Changes = changes

var Write = write
