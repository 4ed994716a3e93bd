package app

// HasPassword is hasPassword.
var HasPassword = hasPassword
