package testenv

import (
	"fmt"
	"os"
	"syscall"
	"testing"
	"unsafe"
)

// Terminal returns both ends of a terminal with so many columns: that of the person, and that of the program.
func Terminal(tb testing.TB, columns int) (person, program *os.File) {
	tb.Helper()
	person, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	Must(tb, err)
	control := func(request uintptr, arg unsafe.Pointer) {
		tb.Helper()
		if _, _, e := syscall.Syscall(syscall.SYS_IOCTL, person.Fd(), request, uintptr(arg)); e != 0 {
			tb.Fatal(e)
		}
	}
	var unlocked, number int32
	control(syscall.TIOCSPTLCK, unsafe.Pointer(&unlocked))
	control(syscall.TIOCGPTN, unsafe.Pointer(&number))
	control(syscall.TIOCSWINSZ, unsafe.Pointer(&[4]uint16{24, uint16(columns)}))
	program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	Must(tb, err)
	tb.Cleanup(func() { _, _ = person.Close(), program.Close() })
	return person, program
}
