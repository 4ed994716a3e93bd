package app

var HasPassword = hasPassword
