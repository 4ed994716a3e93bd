package local

import "syscall"

// dieWithParent makes the kernel send s to the child when the thread that started it ends.
func dieWithParent(a *syscall.SysProcAttr, s syscall.Signal) { a.Pdeathsig = s }
