//go:build !linux

package local

import "syscall"

// dieWithParent does nothing: the kernel has no such signal.
func dieWithParent(*syscall.SysProcAttr, syscall.Signal) {}
